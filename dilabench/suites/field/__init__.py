"""Suite `field`: public projects compared with dilabench."""
