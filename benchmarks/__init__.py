"""Measurements that need a device, and the cases they run."""
