"""What is inspected of each kernel file, in a file of its name; see :mod:`tools.kernels.case`."""
