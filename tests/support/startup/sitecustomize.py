"""Runs first in every Python process of a test's job, as this folder is on its PYTHONPATH."""

import os

if "HVD_TEST_ZYGOTE" in os.environ:
    from stub import hand_over

    hand_over()  # does not come back where a fork of the zygote takes over
if "FAULT_SPEC" in os.environ:
    import faulty

    faulty.main()
