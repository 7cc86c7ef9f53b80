"""``hvd-adaptive calibrate``: measures the ranks and the link, and says which options fit."""
