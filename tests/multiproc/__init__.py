"""Laws that need several processes: each test starts 1 to 4 of them with gloo and compares with one process."""
