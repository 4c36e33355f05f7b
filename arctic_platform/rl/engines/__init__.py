"""Engines: what trains and what samples, behind two small interfaces."""
