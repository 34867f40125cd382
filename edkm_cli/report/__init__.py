"""`edkm report`: one self-contained HTML page about a run, from what `edkm compress` wrote.

No scripts, no requests, no libraries: HTML and SVG are written by hand. `read` takes the files in, `layers` measures
weights against the original ones, `markup` escapes, `charts` draws, `document` puts the page together.
"""
