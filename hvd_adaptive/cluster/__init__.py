"""Starting ranks and binding them to hardware: the launcher's environment, devices, threads, relaunching."""
