"""Names and layouts of other projects: LightRFT, Trinity-RFT, verl and TRL."""
