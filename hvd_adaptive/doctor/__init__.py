"""``hvd-adaptive doctor``: will this machine or allocation work, and what to do if not."""
