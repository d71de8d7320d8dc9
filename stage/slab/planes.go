package slab

// Planes are the names of the planes, by preference: what a reader says it can take (wire.FerryRequest.Planes).
func (s *Slab) Planes() []string { return s.planeNames() }
