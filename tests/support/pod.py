"""A process with the limits of a locked-down pod: those of `examples/kubernetes`, as far as can be.

    /              read-only, and everything that is mounted in it
    /srv/app       this checkout, read-only
    /srv/env       the installed packages, read-only
    /srv/python    the interpreter, read-only: it may live where other users may not go
    /srv/logs      the one place to write: a small tmpfs, as an emptyDir is one
    uid 10001      in no user database, without a home; no capability can be had again
    network        a loopback of its own and nothing else
    processes      a number space of its own: nobody else's are seen
    system calls   those refused that a container runtime's default profile refuses, and ptrace

Needs `unshare` and `setpriv`, and to be root or allowed to make a user namespace.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
UID = 10_001
SPACES = ("--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc")
MACHINES = ("x86_64",)
LIMIT_S = 120

# A new network has its loopback down.
LOOPBACK = """
import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH14s", b"lo", 0x41, b""))
"""
SETUP = """
set -e
mount -t tmpfs -o size=1m,mode=755 pod /srv
mkdir /srv/app /srv/env /srv/python /srv/logs
mount --bind {root} /srv/app
mount --bind {packages} /srv/env
mount --bind {interpreter} /srv/python
{python} -c {loopback}
awk '$2 !~ "^/(proc|dev)(/|$)" {{print $2}}' /proc/self/mounts | sort -u | while read -r place; do
    mount -o remount,bind,ro "$place" 2>/dev/null || true
done
mount -t tmpfs -o size=64m,mode=1777 shm /dev/shm
mount -t tmpfs -o size={bytes},mode=700,uid={owner},gid={owner} logs /srv/logs
cd /srv/logs
exec {leave} --no-new-privs --inh-caps=-all --ambient-caps=-all --bounding-set=-all \\
    env -i PATH=/usr/bin:/bin PYTHONPATH=/srv/app:/srv/env PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 \\
    LD_LIBRARY_PATH=/srv/python/lib HICACHE_TRACE_DIR=/srv/logs TMPDIR=/srv/logs \\
    /srv/python/{executable} -m tests.support.pod "$@"
"""
AS_ROOT = f"setpriv --reuid {UID} --regid {UID} --clear-groups"
AS_USER = f"unshare --user --map-user={UID} --map-group={UID} --keep-caps setpriv"

# Of x86_64. What the default profiles refuse to those without capabilities: mounting, name spaces, keys,
# modules, other processes' memory, clocks, io_uring; and ptrace, which some allow.
REFUSED = (
    *(101, 103, 134, 135, 139, 153, 155, 156, 159, 161, 163, 164, 165, 166, 167, 168, 169, 170, 171, 172),
    *(173, 174, 175, 176, 177, 178, 179, 180, 212, 227, 237, 246, 248, 249, 250, 256, 272, 279, 298, 300),
    *(303, 304, 305, 308, 310, 311, 312, 313, 320, 321, 323, 425, 426, 427, 428, 429, 430, 431, 432, 433),
    *(438, 442),
)
CLONE3 = 435


@cache
def missing() -> str:
    """Why these limits can't be had here, or nothing."""
    for tool in ("unshare", "setpriv", "mount", "awk"):
        if shutil.which(tool) is None:
            return f"a pod's limits can't be set here: there is no {tool} (util-linux)"
    if not Path("/srv").is_dir():
        return "a pod's limits can't be set here: there is no /srv to mount things in"
    if platform.machine() not in MACHINES:
        return f"a pod's system calls are listed for {', '.join(MACHINES)}, not for {platform.machine()}"
    tried = in_pod("-c", "pass")
    return "" if not tried.returncode else f"this kernel does not allow it: {' '.join(tried.stderr.split())}"


def in_pod(*words: str, logs_bytes: int = 16 << 20) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with `words` in a pod that is gone afterwards."""
    is_root = os.geteuid() == 0
    setup = SETUP.format(
        root=shlex.quote(str(ROOT)),
        packages=shlex.quote(str(Path(msgspec.__file__).parents[1])),
        interpreter=shlex.quote(sys.base_prefix),
        executable=shlex.quote(os.path.relpath(os.path.realpath(sys.executable), sys.base_prefix)),
        python=shlex.quote(sys.executable),
        loopback=shlex.quote(LOOPBACK),
        bytes=logs_bytes,
        # In a user namespace of one user only that one can own anything.
        owner=UID if is_root else 0,
        leave=AS_ROOT if is_root else AS_USER,
    )
    spaces = [*SPACES, "--propagation", "private"] if is_root else ["--user", "--map-root-user", *SPACES]
    return subprocess.run(
        ["unshare", *spaces, "sh", "-c", setup, "pod", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def refuse_calls() -> None:
    """From here on, for this process and its children, for ever."""
    import ctypes
    import errno
    import struct

    load, jump_equal, give = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000
    program = [struct.pack("=HBBI", load, 0, 0, 0)]
    # One without an answer falls back to `clone`, which an answer of EPERM would not allow it.
    for number, code in [*((number, errno.EPERM) for number in REFUSED), (CLONE3, errno.ENOSYS)]:
        program.append(struct.pack("=HBBI", jump_equal, 0, 1, number))
        program.append(struct.pack("=HBBI", give, 0, 0, refuse | code))
    program.append(struct.pack("=HBBI", give, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(program))
    filters = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    set_seccomp, by_filter = 22, 2
    if libc.prctl(set_seccomp, by_filter, filters, 0, 0):
        raise OSError(ctypes.get_errno(), "no filter of system calls can be set")


if __name__ == "__main__":
    refuse_calls()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
