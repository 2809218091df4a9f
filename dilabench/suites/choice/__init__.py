"""Suite `choice`: what the library's own choice costs against the fastest of its ways."""
