"""Tests in a real SGLang: `HICACHE_PEERS` names its environment, `HICACHE_RIG` the kit that runs it."""
