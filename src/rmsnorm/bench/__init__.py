"""Speed and memory, measured against every other way to compute the norm and against plain copies.

``grid`` names the cells and ``goals`` what must hold in them. ``limit`` and ``stream`` hold the
memory and the copies, ``peers`` and ``engines`` what is timed beside them. ``run`` times and
judges, ``memory`` takes the peak of a forward and backward, ``verdicts`` tells which goals hold,
``report`` turns all of it into tables and into JSON, ``plot`` into a picture. ``ahead`` fills the
compiler's cache before a longer run. ``paired`` tells differences that are smaller than the noise,
for whole models, and ``alone`` runs their norms alone. ``process`` keeps the collector and the C
library quiet meanwhile.
"""
