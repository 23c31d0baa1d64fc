"""The dashboard: a page with many runs, and the live report of each, served to people who look.

In come run directories (`runs` finds them, and renews what it knows of each as cheaply as it can). Out goes HTML that
needs nothing of any other host: `app` answers requests, `feeds` tells open pages what has changed, `access` says who
may ask. It only reads, and nothing is read while nobody looks.
"""
