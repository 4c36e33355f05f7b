"""The calls, executed: one backend, whatever transport they came by."""
