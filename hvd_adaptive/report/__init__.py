"""Pictures and tables of run directories."""
