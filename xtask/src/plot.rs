//! Plots as SVG text: panels of bars with whiskers, readable without the numbers beside them.
//!
//! Not here: the plotted values; experiments build the panels from their report.

/// One picture: a title, a line on the method, panels side by side.
#[derive(Debug, Clone)]
pub struct Chart {
    pub title: String,
    pub subtitle: String,
    pub panels: Vec<Panel>,
}

/// Bars that share a unit and an axis.
#[derive(Debug, Clone)]
pub struct Panel {
    pub title: String,
    pub unit: String,
    pub bars: Vec<Bar>,
}

/// Many values one after the other, each curve with its own axes.
#[derive(Debug, Clone)]
pub struct Curves {
    pub title: String,
    pub subtitle: String,
    pub curves: Vec<Curve>,
}

#[derive(Debug, Clone)]
pub struct Curve {
    pub title: String,
    pub unit: String,
    pub values: Vec<f64>,
}

/// A median with the least and greatest of its rounds.
#[derive(Debug, Clone)]
pub struct Bar {
    pub label: String,
    pub value: f64,
    pub min: f64,
    pub max: f64,
}

const BAR_WIDTH: f64 = 46.0;
const BAR_GAP: f64 = 26.0;
const PANEL_GAP: f64 = 36.0;
const AXIS_WIDTH: f64 = 62.0;
const PLOT_HEIGHT: f64 = 240.0;
const PLOT_TOP: f64 = 128.0;
const LABEL_HEIGHT: f64 = 92.0;
const MARGIN: f64 = 28.0;
const PANELS_PER_ROW: usize = 3;
const CURVE_WIDTH: f64 = 420.0;
const CURVES_PER_ROW: usize = 2;

/// nagaya in the strong colour, all others in quiet ones, so that it is found at once.
const OWN_COLOUR: &str = "#c2410c";
const PEER_COLOURS: [&str; 6] = ["#475569", "#64748b", "#94a3b8", "#7c8ba1", "#b0bccb", "#556274"];

impl Chart {
    pub fn svg(&self) -> String {
        let rows: Vec<&[Panel]> = self.panels.chunks(PANELS_PER_ROW).collect();
        let row_width =
            |row: &[Panel]| row.iter().map(Panel::width).sum::<f64>() + gaps(row.len()) * PANEL_GAP;
        let text_width = 7.2 * units(self.subtitle.len().max(self.title.len()));
        let width = rows.iter().map(|row| row_width(row)).fold(text_width, f64::max) + 2.0 * MARGIN;
        let row_height = PLOT_HEIGHT + LABEL_HEIGHT + 64.0;
        let height = PLOT_TOP - 44.0 + units(rows.len()) * row_height;
        let mut svg = begin(width, height, &self.title, &self.subtitle);
        for (index, row) in rows.iter().enumerate() {
            let mut x = MARGIN;
            for panel in *row {
                panel.draw(&mut svg, x, PLOT_TOP + units(index) * row_height);
                x += panel.width() + PANEL_GAP;
            }
        }
        svg.push_str("</svg>\n");
        svg
    }
}

impl Curves {
    pub fn svg(&self) -> String {
        let rows = self.curves.len().div_ceil(CURVES_PER_ROW);
        let (cell, row_height) = (AXIS_WIDTH + CURVE_WIDTH + PANEL_GAP, PLOT_HEIGHT + 84.0);
        let width = 2.0 * MARGIN + units(CURVES_PER_ROW) * cell;
        let mut svg = begin(width, PLOT_TOP + units(rows) * row_height, &self.title, &self.subtitle);
        for (index, curve) in self.curves.iter().enumerate() {
            let (row, column) = (index / CURVES_PER_ROW, index % CURVES_PER_ROW);
            curve.draw(&mut svg, MARGIN + units(column) * cell, PLOT_TOP + units(row) * row_height);
        }
        svg.push_str("</svg>\n");
        svg
    }
}

impl Curve {
    fn draw(&self, svg: &mut String, x: f64, top: f64) {
        let bottom = top + PLOT_HEIGHT;
        let left = x + AXIS_WIDTH;
        let most = self.values.iter().copied().fold(0.0, f64::max);
        let scale = axis(svg, (left, left + CURVE_WIDTH), bottom, most);
        svg.push_str(&text(x, top - 26.0, 14.0, "start", "#0f172a", "bold", &self.title));
        svg.push_str(&text(x, top - 10.0, 11.0, "start", "#64748b", "normal", &self.unit));
        let step = CURVE_WIDTH / units(self.values.len().max(1));
        // A line upwards for each: a single high one among thousands is not lost.
        let points = self.values.iter().enumerate().map(|(index, value)| {
            format!("M{:.2} {bottom:.1}V{:.1}", left + units(index) * step, bottom - value * scale)
        });
        let points: String = points.collect();
        svg.push_str(&format!(
            "<path d=\"{points}\" stroke=\"{OWN_COLOUR}\" stroke-width=\"0.7\" fill=\"none\"/>\n"
        ));
        let count = self.values.len().to_string();
        svg.push_str(&text(left + CURVE_WIDTH, bottom + 16.0, 11.0, "end", "#64748b", "normal", &count));
    }
}

/// Draws lines and numbers up to a round value above `most`. Returns the height of one unit.
fn axis(svg: &mut String, (left, right): (f64, f64), bottom: f64, most: f64) -> f64 {
    let step = tick_step(most);
    let ticks = (most / step).ceil().max(1.0);
    let scale = PLOT_HEIGHT / (ticks * step);
    let mut value = 0.0;
    while value <= ticks * step + step / 2.0 {
        let y = bottom - value * scale;
        let colour = if value == 0.0 { "#334155" } else { "#e2e8f0" };
        svg.push_str(&line(left, y, right, y, colour, 1.0));
        svg.push_str(&text(left - 8.0, y + 4.0, 11.0, "end", "#64748b", "normal", &short(value)));
        value += step;
    }
    scale
}

/// Returns the head of a picture and its titles.
fn begin(width: f64, height: f64, title: &str, subtitle: &str) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
         height=\"{height:.0}\" font-family=\"'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    svg.push_str(&text(MARGIN, 38.0, 19.0, "start", "#0f172a", "bold", title));
    svg.push_str(&text(MARGIN, 60.0, 12.5, "start", "#475569", "normal", subtitle));
    svg
}

impl Panel {
    fn width(&self) -> f64 {
        let bars = AXIS_WIDTH + BAR_GAP + units(self.bars.len()) * (BAR_WIDTH + BAR_GAP);
        bars.max(AXIS_WIDTH + 7.4 * units(self.title.len()))
    }

    fn draw(&self, svg: &mut String, x: f64, top: f64) {
        let bottom = top + PLOT_HEIGHT;
        let most = self.bars.iter().map(|bar| bar.max).fold(0.0, f64::max);
        svg.push_str(&text(x, top - 26.0, 14.0, "start", "#0f172a", "bold", &self.title));
        svg.push_str(&text(x, top - 10.0, 11.0, "start", "#64748b", "normal", &self.unit));

        let left = x + AXIS_WIDTH;
        let right = left + BAR_GAP + units(self.bars.len()) * (BAR_WIDTH + BAR_GAP);
        let scale = axis(svg, (left, right), bottom, most);
        let mut peers = PEER_COLOURS.iter().cycle();
        for (index, bar) in self.bars.iter().enumerate() {
            let own = bar.label.starts_with("nagaya");
            let colour = if own { OWN_COLOUR } else { peers.next().unwrap_or(&PEER_COLOURS[0]) };
            bar.draw(svg, left + BAR_GAP + units(index) * (BAR_WIDTH + BAR_GAP), bottom, scale, colour);
        }
    }
}

impl Bar {
    fn draw(&self, svg: &mut String, x: f64, bottom: f64, scale: f64, colour: &str) {
        let height = self.value * scale;
        let middle = x + BAR_WIDTH / 2.0;
        svg.push_str(&format!(
            "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"{BAR_WIDTH}\" height=\"{height:.1}\" rx=\"2\" fill=\"{colour}\"/>\n",
            bottom - height
        ));
        let (low, high) = (bottom - self.min * scale, bottom - self.max * scale);
        svg.push_str(&line(middle, low, middle, high, "#0f172a", 1.3));
        for y in [low, high] {
            svg.push_str(&line(middle - 6.0, y, middle + 6.0, y, "#0f172a", 1.3));
        }
        svg.push_str(&text(middle, high - 7.0, 11.5, "middle", "#0f172a", "bold", &short(self.value)));
        svg.push_str(&format!(
            "<text transform=\"translate({:.1} {:.1}) rotate(-35)\" font-size=\"12\" text-anchor=\"end\" \
             fill=\"#1e293b\">{}</text>\n",
            middle + 6.0,
            bottom + 18.0,
            escape(&self.label)
        ));
    }
}

fn text(x: f64, y: f64, size: f64, anchor: &str, colour: &str, weight: &str, content: &str) -> String {
    format!(
        "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" text-anchor=\"{anchor}\" fill=\"{colour}\" \
         font-weight=\"{weight}\">{}</text>\n",
        escape(content)
    )
}

fn line(x1: f64, y1: f64, x2: f64, y2: f64, colour: &str, width: f64) -> String {
    format!(
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\" \
         stroke-width=\"{width}\"/>\n"
    )
}

fn escape(content: &str) -> String {
    content.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Returns 1, 2 or 5 times a power of ten. An axis to `most` then has between four and eight steps
/// with head room.
fn tick_step(most: f64) -> f64 {
    if most <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf((most / 5.0).log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|m| m * power)
        .find(|step| most / step <= 6.0)
        .unwrap_or(10.0 * power)
}

/// `120k`, `1.5k`, `12`, `0.35`.
fn short(value: f64) -> String {
    let with = |number: f64, unit: &str| {
        let digits = if number >= 100.0 || number.fract().abs() < 1e-9 { 0 } else { 1 };
        format!("{number:.digits$}{unit}")
    };
    match value {
        v if v >= 1e6 => with(v / 1e6, "M"),
        v if v >= 1e4 => with(v / 1e3, "k"),
        v if v >= 1e3 => with(v / 1e3, "k"),
        v if v >= 10.0 => with(v, ""),
        v if v >= 1.0 || v == 0.0 => format!("{v:.1}").trim_end_matches(".0").to_string(),
        v => format!("{v:.2}"),
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of bars and letters are small")]
fn units(count: usize) -> f64 {
    count as f64
}

fn gaps(count: usize) -> f64 {
    units(count.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axis_steps_are_round_and_few() {
        for (most, step) in [(175_000.0, 50_000.0), (6.0, 1.0), (0.9, 0.2), (31.0, 10.0), (0.0, 1.0)] {
            assert!((tick_step(most) - step).abs() < step * 1e-9, "{most}: {}", tick_step(most));
        }
    }

    #[test]
    fn a_chart_holds_every_bar_and_escapes_its_text() {
        let bar = Bar { label: "nagaya".into(), value: 10.0, min: 9.0, max: 11.0 };
        let panel = Panel { title: "a < b".into(), unit: "requests/s".into(), bars: vec![bar; 3] };
        let svg = Chart { title: "t".into(), subtitle: "s".into(), panels: vec![panel] }.svg();
        assert_eq!(svg.matches("rotate(-35)").count(), 3);
        assert!(svg.contains("a &lt; b") && svg.ends_with("</svg>\n"));
    }

    #[test]
    fn a_curve_has_every_value() {
        let curve = Curve { title: "t".into(), unit: "ms".into(), values: vec![1.0, 250.0, 3.0] };
        let svg = Curves { title: "t".into(), subtitle: "s".into(), curves: vec![curve; 3] }.svg();
        assert_eq!(svg.matches('M').count(), 9);
    }
}
