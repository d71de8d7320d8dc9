package engine

import (
	"bytes"
	"fmt"
	"image"
	"image/color"
	_ "image/jpeg" // decoders of what is accepted
	_ "image/png"
	"math"

	"golang.org/x/image/draw"
)

// The processor of Qwen2-VL: patches of 14 x 14 pixels, merged 2 x 2, and 4 to 1280 merged patches an image
// (preprocessor_config.json of the model: patch_size, merge_size, min_pixels, max_pixels).
const (
	patchSide  = 14
	mergeSide  = 2
	factor     = patchSide * mergeSide // side of a merged patch in pixels; both sides of a sized image are multiples of it
	minPixels  = 56 * 56
	maxPixels  = 1280 * factor * factor
	maxAspect  = 200
	rowInputs  = factor * factor * 3 // pixels of a merged patch, three channels
	processing = "qwen2vl patch=14 merge=2 min=3136 max=1003520 catmullrom white"
)

// Grid is image_grid_thw of one image: frames (1), and rows and columns of patches before the merge.
type Grid [3]int

// Rows is the number of rows of the encoding: one a merged patch.
func (g Grid) Rows() int { return g[0] * g[1] * g[2] / (mergeSide * mergeSide) }

// valid refuses what no image of this processor has. It bounds the product too.
func (g Grid) valid() error {
	for _, n := range g {
		if n < 1 || n > maxPixels/patchSide {
			return fmt.Errorf("image_grid_thw %v: each number must be from 1 to %d", g, maxPixels/patchSide)
		}
	}
	if g[0] != 1 || g[1]%mergeSide != 0 || g[2]%mergeSide != 0 {
		return fmt.Errorf("image_grid_thw %v: want [1, even, even]", g)
	}
	if r := g.Rows(); r > maxPixels/(factor*factor) {
		return fmt.Errorf("image_grid_thw %v is %d rows; at most %d", g, r, maxPixels/(factor*factor))
	}
	return nil
}

// gridOf says how the processor sizes an image of w x h pixels.
func gridOf(w, h int) (Grid, error) {
	if w < 1 || h < 1 {
		return Grid{}, fmt.Errorf("the image is %d x %d pixels", w, h)
	}
	if max(w, h) > maxAspect*min(w, h) {
		return Grid{}, fmt.Errorf("the image is %d x %d pixels: one side is more than %d times the other", w, h, maxAspect)
	}
	fw, fh := float64(w), float64(h)
	side := func(x float64) int { return max(factor, int(x)*factor) }
	gw, gh := side(math.RoundToEven(fw/factor)), side(math.RoundToEven(fh/factor))
	switch {
	case gw*gh > maxPixels:
		beta := math.Sqrt(fw * fh / maxPixels)
		gw, gh = side(math.Floor(fw/beta/factor)), side(math.Floor(fh/beta/factor))
	case gw*gh < minPixels:
		beta := math.Sqrt(minPixels / (fw * fh))
		gw, gh = side(math.Ceil(fw*beta/factor)), side(math.Ceil(fh*beta/factor))
	}
	// A narrow image keeps one merged patch across, which can leave it over the limit lengthwise.
	if gw*gh > maxPixels {
		if gw > gh {
			gw = maxPixels / gh / factor * factor
		} else {
			gh = maxPixels / gw / factor * factor
		}
	}
	return Grid{1, gh / patchSide, gw / patchSide}, nil
}

// pixels is a decoded image at the size that the processor gave it: opaque RGBA, no padding between lines.
type pixels struct {
	grid   Grid
	rgba   *image.RGBA
	source image.Point // size of the image as it came
}

// imageConfig reads an image's head only: what is refused here has cost no memory.
func imageConfig(b []byte, limit int) (image.Config, error) {
	c, _, err := image.DecodeConfig(bytes.NewReader(b))
	if err != nil {
		return c, fmt.Errorf("not a JPEG or PNG image that can be decoded: %w", err)
	}
	if c.Width < 1 || c.Height < 1 || c.Width > limit/c.Height {
		return c, fmt.Errorf("the image says that it is %d x %d pixels; at most %d pixels are decoded", c.Width, c.Height, limit)
	}
	return c, nil
}

// decodeImage decodes and sizes one JPEG or PNG. Transparent parts become white. limit is the most pixels that are decoded.
func decodeImage(b []byte, limit int) (*pixels, error) {
	c, err := imageConfig(b, limit)
	if err != nil {
		return nil, err
	}
	g, err := gridOf(c.Width, c.Height)
	if err != nil {
		return nil, err
	}
	src, _, err := image.Decode(bytes.NewReader(b))
	if err != nil {
		return nil, fmt.Errorf("the image is damaged: %w", err)
	}
	dst := image.NewRGBA(image.Rect(0, 0, g[2]*patchSide, g[1]*patchSide))
	draw.Draw(dst, dst.Rect, image.NewUniform(color.White), image.Point{}, draw.Src)
	if src.Bounds().Size() == dst.Rect.Size() {
		draw.Draw(dst, dst.Rect, src, src.Bounds().Min, draw.Over)
	} else {
		draw.CatmullRom.Scale(dst, dst.Rect, src, src.Bounds(), draw.Over, nil)
	}
	return &pixels{grid: g, rgba: dst, source: src.Bounds().Size()}, nil
}
