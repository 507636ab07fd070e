"""For tests only: the suite that every backend must pass, and a backend that fails on command."""
