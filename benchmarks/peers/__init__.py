"""This engine beside others on one machine, in one run. Standard library only: the engines' environments import it
too."""
