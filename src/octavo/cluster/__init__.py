"""Octavo on several machines, with Ray Serve. Needs the extra `cluster`.

    HTTP --> proxy (Ray) --> Front: API app, text, choice of a replica --> Replica: an engine process, tokens only
                             any number                                    any number, each on one node

`messages`, `replica` and `transport` know nothing of Ray, which only `calls`, `app` and `launcher` import.
"""
