// -- palette: colours of kinds on the page's own background -----------------------------------------------------------

// Of a kind, by name, so that neighbours can be told apart
const SHADES = 3;
// Tone of a slice that is not drawn
const HIDE = 255;

const rgbOf = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const mix = (a, b, share) => a.map((value, i) => round(value + (b[i] - value) * share));
const packed = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
const luminance = ([r, g, b]) => (0.299 * r + 0.587 * g + 0.114 * b) / 255;
const css = ([r, g, b]) => `rgb(${r},${g},${b})`;

/** The colours as they are now. A tone is kind * SHADES + shade, doubled where a slice may be dim. */
class Palette {
  constructor(root, kinds) {
    this.kinds = kinds;
    this.read(root);
  }

  /** Ask the page for its colours; themes come and go. */
  read(root) {
    const style = getComputedStyle(root);
    const bg = numbers(style.backgroundColor), fg = numbers(style.color);
    Object.assign(this, { bg: css(bg), fg: css(fg), soft: css(mix(bg, fg, 0.72)), accent: style.outlineColor });
    [this.bgBits, this.stripeBits, this.lineBits] = [0, 0.035, 0.14].map((share) => packed(mix(bg, fg, share)));
    this.tones = [];
    for (const dim of [0, 0.8]) {
      for (const [, letter, hue, hatch] of this.kinds) {
        for (let shade = 0; shade < SHADES; shade++) {
          const rgb = mix(mix(rgbOf(hue), [255, 255, 255], shade * 0.13), bg, dim);
          const ink = luminance(rgb) > 0.5 ? [0, 0, 0] : [255, 255, 255];
          this.tones.push({ rgb, letter, hatch, bits: packed(rgb), edge: packed(mix(rgb, fg, dim ? 0.15 : 0.45)), ink: dim ? this.soft : css(ink), hatchBits: packed(mix(rgb, ink, 0.3)) });
        }
      }
    }
    this.half = this.kinds.length * SHADES;
    // Blended with the background by coverage: 64 levels from the floor that keeps a lone slice visible.
    this.levels = new Uint32Array(this.tones.length * 64);
    this.tones.forEach(({ rgb }, tone) => {
      for (let level = 0; level < 64; level++) this.levels[tone * 64 + level] = packed(mix(bg, rgb, 0.25 + (0.75 * level) / 63));
    });
  }
}

/** "rgb(1, 2, 3)" or "color(srgb 0.1 0.2 0.3)" */
function numbers(text) {
  const found = (text.match(/[\d.]+/g) || [0, 0, 0]).slice(0, 3).map(Number);
  return /^color/.test(text) ? found.map((value) => round(value * 255)) : found;
}
