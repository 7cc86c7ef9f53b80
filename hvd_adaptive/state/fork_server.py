"""Imported by multiprocessing's fork server when it starts: neither it nor its workers react to a signal for the whole job."""

import sys

from hvd_adaptive.state.preemption import PREEMPTION

# Tools that import every module shall find nothing changed.
if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    PREEMPTION.become_worker()
