"""Speed and memory, measured against every other way to compute the norm and against a plain copy.

``grid`` names the cells, ``limit`` and ``peers`` hold what is timed in each of them, ``run`` times
and judges, ``memory`` takes the peak of a forward and backward, ``report`` turns the results into
tables and into JSON. ``ahead`` fills the compiler's cache before a longer run.
"""
