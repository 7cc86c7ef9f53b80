"""Starting ranks and binding them to hardware: what the launcher says, devices, threads, relaunching under
mpirun."""
