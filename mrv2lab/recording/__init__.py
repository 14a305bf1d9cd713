"""A recording is a value: scheduler outputs, staged diffs, tokens, spans and marks of a run, and what follows.

No torch in here: a file made on a GPU is stepped on any laptop. ``schema`` says what a step's record holds, ``write``
and ``read`` are the file, ``replay`` rebuilds the integer state with the ops' NumPy specs, ``view`` is one step as the
step explorer shows it.
"""
