"""The exit codes of commands and ranks."""

EXIT_PROBLEMS = 1
"""``doctor`` found a problem."""
EXIT_BAD_INPUT = 2
"""The job was given something that it cannot do."""
EXIT_STAGE_FAILED = 3
"""A rank of ``doctor`` failed at what all others need."""
EXIT_FAULT = 14
"""A rank is dead, frozen or stuck."""
EXIT_TOO_FEW_HOSTS = 69
"""No hosts came for an elastic job (EX_UNAVAILABLE of sysexits.h)."""
EXIT_PREEMPTED = 75
"""The job was asked to end and has saved: start it again and it goes on (EX_TEMPFAIL of sysexits.h)."""
EXIT_INTERRUPTED = 130
"""Ctrl-C ended the command (128 + SIGINT, as in a shell); a training has saved as for 75."""
EXIT_NO_READER = 141
"""Whoever read standard output has closed it (128 + SIGPIPE, as in a shell)."""
