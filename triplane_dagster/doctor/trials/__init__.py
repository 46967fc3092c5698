"""Trials that need a process of their own, since they may hang, crash, or import what takes seconds. Each is run as a
module.
"""
