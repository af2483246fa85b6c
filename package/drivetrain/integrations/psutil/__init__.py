"""psutil: the use of the machine while a fit runs."""
