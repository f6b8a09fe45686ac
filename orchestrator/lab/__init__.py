"""What measures: benchmarks and studies, as experiments behind one form.

What runs imports nothing of this room. The command line finds an experiment by its name, in
`orchestrator.lab.registry`, and loads it when it is asked for.
"""
