// Colours of blocks. A pattern, a number or a letter repeats what a colour shows.

// Okabe and Ito's palette, which most colour-blind people can distinguish; its two blues are not neighbours.
const OWNERS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c7a00", "#7a5195"];

export const ownerColour = (slot) => OWNERS[slot % OWNERS.length];

// 0 -> A, 25 -> Z, 26 -> AA: the letter of an owner.
export function letter(slot) {
  const last = String.fromCharCode(65 + (slot % 26));
  return slot < 26 ? last : letter(Math.floor(slot / 26) - 1) + last;
}

// The slot of a letter.
export const slotOf = (name) => [...name].reduce((slot, c) => 26 * (slot + 1) + c.charCodeAt(0) - 65, -1);

// "#rrggbb" -> [r, g, b]
export const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

// a * share + b * (1 - share), as [r, g, b]
export const mix = (a, b, share) => a.map((x, i) => Math.round(x * share + b[i] * (1 - share)));
export const css = ([r, g, b]) => `rgb(${r},${g},${b})`;

// A pixel of an ImageData as one little-endian number.
export const pixel = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;

// Black or white, whichever has more contrast on the colour (WCAG's relative luminance).
export function inkOn(colour) {
  const [r, g, b] = colour.map((c) => (c / 255 <= 0.04045 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000" : "#fff";
}

// The theme's colours, from the style sheet.
export function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const theme = {};
  for (const name of ["surface", "sunken", "ink", "muted", "line", "accent", "warn"])
    theme[name] = rgb(style.getPropertyValue(`--${name}`).trim());
  return theme;
}

// Steps of one hue, from pale to full: for counts and ages. They differ in lightness, too.
export function ramp(theme, numSteps) {
  return Array.from({ length: numSteps }, (_, i) =>
    mix(theme.accent, theme.surface, 0.15 + (0.85 * i) / (numSteps - 1)),
  );
}
