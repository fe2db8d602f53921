"""kvdock backend that keeps pages through storage classes of SGLang HiCache."""
