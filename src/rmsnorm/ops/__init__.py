"""The operations: one file each, chosen between in :mod:`rmsnorm.ops.route`."""
