"""Material for lessons: ``mutants``, deliberate bugs to be found."""
