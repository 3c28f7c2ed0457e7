"""Evidence of processes that stand still, gathered before somebody restarts them.

the process itself                                    whoever asks, in another process
armed    a signal that makes it write its stacks,     recorder  finds that out, and asks
         and a file that makes it write the rest      outside   py-spy, the recorder's pipe, log tails
                                                      procfs    what the system says of it
                                                      take      all that, of many, in bounded time
"""
