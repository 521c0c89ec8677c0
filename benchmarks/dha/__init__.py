"""Direct host access: what operators cost over the link, against what the link and compute cost by themselves."""
