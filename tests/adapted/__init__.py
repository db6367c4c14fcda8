"""Small re-creations of the forms in which people write gradient synchronization.

Nobody here knows distcheck; test_adapted.py says what each is to be taken as and what is required.
"""
