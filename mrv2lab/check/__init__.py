"""Is it right? ``twin``: two runners on one schedule. ``races``: does the host write what the device has yet to read?
``invariants``: does a runner's state contradict itself?"""
