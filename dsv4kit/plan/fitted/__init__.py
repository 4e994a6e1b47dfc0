"""What is fitted: measured runs beside the planner.

`calibrated` names the runs the constants were fitted to, and says where a question leaves them; `measured` reads what a
run showed; `calibration` turns that into constants, which `site_constants` keeps per site and puts over the built-in.
"""
