"""What XLA's CPU compiler does not do well enough, written in C++ and compiled by the machine that runs it."""
