"""CPU kernels in C++: compiled at first use, loaded with ctypes, each with a torch twin that says the same slowly."""
