"""Forward speed, measured against every other way to compute the norm and against a plain copy.

``grid`` names the cells, ``limit`` and ``peers`` hold what is timed in each of them, ``run`` times
and judges, ``report`` turns the results into a table and into JSON.
"""
