"""Existing Horovod scripts made adaptive: what they use is intercepted in place, and they run unedited."""
