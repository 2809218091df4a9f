"""The conformance suite: everything that is asked of a thing that a plug-in adds, one file per kind of thing.

Whether outputs are right is for the engine's verification to say; nothing of it is written a second time here.
"""
