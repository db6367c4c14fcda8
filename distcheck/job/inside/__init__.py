"""What runs in the processes of a job; `hook/sitecustomize.py` begins it."""
