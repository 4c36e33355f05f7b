"""Other trainers' configs and calls in this package's terms, one folder for each; nothing below imports them."""
