"""What is fitted: measured runs beside the planner.

`calibrated` names the runs the constants were fitted to, and says where a question leaves them; `measured` reads what a
run showed (`timeline`: when its updates ran); `fitting` turns that into constants; `calibration` keeps them per site,
and `site_constants` puts them over the built-in ones.
"""
