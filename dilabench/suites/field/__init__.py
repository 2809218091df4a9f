"""Suite `field`: public projects beside ours."""
