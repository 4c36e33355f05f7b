"""How calls travel. A transport has one method: a request in, its response out."""
