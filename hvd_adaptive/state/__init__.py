"""The checkpoint format, and the signals that ask for a last one."""
