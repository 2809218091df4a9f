"""Suite `optimization`: what each optimization brings."""
