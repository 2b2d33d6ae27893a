"""Mistakes of precision in a training: which line, what it does, and what was measured.

``run`` attaches to torch and tells rules what a program does, ``facts`` is what all rules know,
``values`` shows them the functions that the program calls. A rule is a class in ``scales``,
``steps``, ``schedules``, ``autocast``, ``loss``, ``sums`` or ``ends``; its docstring says what it
sees, what it prints and when it is silent. ``finding`` is what is printed, ``mistakes`` the table
of kinds.
"""

__all__: list[str] = []
