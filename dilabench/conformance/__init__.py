"""The conformance suite: all checks of a component that a plug-in adds, one file per kind of component.

The engine's verification checks outputs; the suite calls it and repeats none of it.
"""
