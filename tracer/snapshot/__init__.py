"""Evidence of processes that stand still, gathered before somebody restarts them.

the process itself                                    whoever asks, in another process
armed    a file that makes a thread of it answer,     recorder  finds that out, and asks
         and a signal for where none gets a turn      pulse     whether any gets a turn
                                                      outside   py-spy, the recorder's pipe, log tails
                                                      procfs    what the system says of it
                                                      take      all that, of many, in bounded time
"""
